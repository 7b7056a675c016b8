"""Ordinary answers of many kinds: none of them may be refused, and none may lose a word."""

import json
import random
from typing import Any

TEXTS = [
    "Plain sentence.",
    "  leading and trailing white space \t",
    "\n\nnewlines around it\n\n\n",
    "\u00a0no-break space and \u3000ideographic space\u3000",
    "# Title\n\n* one\n* two\n\n> quoted **bold** _it_ `code`\n\n---",
    "| a | b |\n|---|---|\n| 1 | `x|y` |\n",
    "```python\ndef f(x):\n    return {'a': \"b\\n\", **x}  # <tag>\n```",
    '```html\n<div class="x"><p>Hi &amp; bye</p></div>\n<br/>\n```',
    r"$\frac{a}{b} \neq \sum_{i=0}^{\infty} x_i$ and \[ \alpha \\ \beta \]",
    '{"a": [1, 2.50, null, true], "b": {"c": "d \\"e\\""}, "t": "\\u00e9"}',
    "C:\\new\\table\\readme.txt and \\n is not a newline",
    "हिन्दी में लिखा हुआ उत्तर, कृपया पढ़ें।",
    "中文回答：今天天气很好。\n第二行。",
    "日本語とEmoji 👩‍👩‍👧‍👦 🇩🇪 ☕️ é e\u0301 ﬁ Å \u212b ２０２６",
    "กำลังทดสอบ และ العربية من اليمين",
    "<tag> text </tag>, <image> as a word, <b>x</b>, 3 < 4 > 2, a<|b|>c, <|user|>, </s>, [INST]",
    "<ref>the cat</ref><box>(1,2),(3,4)</box> and <|object_ref_start|>cat<|object_ref_end|>",
    "<|box_start|>(10,20),(30,40)<|box_end|>",
    "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>c",
    "<thinking>not the tag</thinking> <think_more> think> </ think>",
    "The tag <think> opens the block.",
    "{{ messages }} {% for x in y %} {# note #} %} }}",
    *("Yes", "0", "."),
    "a\r\nb\rc\x0bd\x0ce\u2028f\u2029g",
    "tab\tseparated\tvalues\n1\t2\t3",
    "'single' \"double\" `back` “curly” ‘quotes’ …",
    "<answer>42</answer>\n<reason>because</reason>",
    '<tool_call>\n{"name": "f", "arguments": {"x": 1.5}}\n</tool_call>',
    "im_end, <|im_end >, < |im_start|>, |im_end|, <|IM_END|>, endoftext",
    "same same same same",
]
FIELDS = {"q": {"type": "string"}, "n": {"type": "number"}}
FUNCTION = {"name": "look_up", "parameters": {"type": "object", "properties": FIELDS}}
FUNCTION["description"] = 'Looks up <things> | "quoted" हिन्दी.'
TOOL = {"type": "function", "function": FUNCTION}


def ordinary_records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """``count`` records: questions and answers of the texts above, with thinking and calls."""
    draw = random.Random(seed)
    return [_record(draw) for _ in range(count)]


def _text(draw: random.Random) -> str:
    return draw.choice(["", " ", "\n"]).join(draw.choices(TEXTS, k=draw.choice([1, 1, 2, 3])))


def _answer(draw: random.Random) -> dict[str, Any]:
    answer = {"role": "assistant", "content": _text(draw)}
    kind = draw.random()
    reasoning = _text(draw).replace("<think>", "")
    if kind < 0.2:
        answer["reasoning_content"] = reasoning
    elif kind < 0.4:
        block = draw.choice(
            ["<think>\n{}\n</think>\n\n", "<think>{}</think>", "{}\n</think>\n", "\n<think>{}</think> "]
        )
        answer["content"] = block.replace("{}", reasoning) + answer["content"]
    elif kind < 0.45:
        answer["content"] = "<think>\n\n</think>\n\n" + answer["content"]
    elif kind < 0.55:
        answer["content"] = [{"type": "text", "text": text} for text in draw.choices(TEXTS, k=3)]
    return answer


def _record(draw: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.3:
        messages.append({"role": "system", "content": _text(draw)})
    tools = [TOOL] if draw.random() < 0.3 else []
    for _ in range(draw.choice([1, 1, 2, 3])):
        messages.append({"role": "user", "content": _text(draw)})
        if tools:
            messages += _called(draw)
        messages.append(_answer(draw))
    return {"messages": messages, "tools": tools, "markers": "text"}


def _called(draw: random.Random) -> list[dict[str, Any]]:
    """Calls with values of all kinds, and their results, also in another order."""
    calls = []
    for i in range(draw.choice([1, 2, 3])):
        arguments: dict[str, Any] = {
            "q": _text(draw),
            "n": draw.choice([0, -1, 1.5, 1e-5, 10**20, 0.1, 1e300, True, None]),
            "deep": {"list": [_text(draw), {"k": draw.choice(TEXTS)}], "e": [], "o": {}},
        }
        # A server would take it for the end of the call, so that conversion refuses it.
        arguments = json.loads(json.dumps(arguments).replace("</tool_call>", ""))
        written = (
            json.dumps(arguments, ensure_ascii=draw.random() < 0.5) if draw.random() < 0.5 else arguments
        )
        function = {"name": "look_up", "arguments": written}
        calls.append({"id": f"call_{i}", "type": "function", "function": function})
    results = [{"role": "tool", "tool_call_id": call["id"], "content": _text(draw)} for call in calls]
    if draw.random() < 0.3:
        draw.shuffle(results)
    return [{**_answer(draw), "tool_calls": calls}, *results]
