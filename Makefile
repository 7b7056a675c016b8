# The targets a newcomer and the CI use. Each prepares the virtual environment first, once, on any machine with Python 3.12.

PYTHON ?= python3.12
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Python compiles what it imports; compiling all 25,000 files would take another minute.
INSTALL := $(BIN)/python -m pip install --no-compile
# Hundreds of processes import the same files: they are compiled once, also where containers forbid that.
export PYTHONDONTWRITEBYTECODE :=
# SEED=1 runs the tests in a random order that the seed repeats.
ORDER  := $(if $(SEED),-p randomly -p no:cacheprovider --randomly-seed=$(SEED),-p no:randomly)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ORDER)
# A file's tests stay in one process: groups of processes are started once for all that read their results.
# The ranks of a group wait for each other, so that three files keep two cores busier than two files do.
WORKERS ?= 3
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The newest transformers that pyproject.toml allows; constraints.txt has the oldest. Tests of what follows
# its rules (positions, prompts, processors, configs), or of its modules, run with both, as do parity and
# evaluate; with VLMEvalKit where `make eval` has installed it. Tests that count FLOPs of our own modules alone
# are left out.
NEWEST := $(VENV)/transformers-5.24.0
RULES  := $(addprefix tests/, spec/test_video_positions.py spec/test_absent_fields.py spec/test_yarn.py \
          converters/test_fp8.py converters/test_add_tokens.py converters/test_yarn_export.py \
          data/test_tokenizer_file.py data/test_assemble.py data/test_chat.py data/test_pixels.py data/test_loader.py \
          data/test_qwen3_5_prompts.py data/test_chat_end.py toolkit/test_hf_videos.py toolkit/test_generate.py \
          toolkit/test_parity.py toolkit/test_evaluate.py weights/test_trained_media.py estimate/test_flops.py)
EXCEPT_OWN := not of_our_modules and not multi_token_prediction_equals

# The tests with the mark `eval`: collecting all others would take longer than they do.
EVAL := $(addprefix tests/, toolkit/test_evaluate.py security/test_evaluate.py)

# The newest released Megatron-core, beside the pinned one.
NEXT := $(VENV)/next
CORE := $(shell sed -n 's/^megatron-core==//p' constraints.txt)

# Code and text of this project, without what commands write in the checkout.
SPELLED := *.md *.toml *.yml Makefile $(addsuffix /,megatron_vl converters data_tools toolkit docs tests examples benchmarks)

.PHONY: help demo quick test test-full test-eval test-next test-transformers check lint types docs pages setup eval lock clean

help:            ## what can be made
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/'

demo: $(READY)   ## Hugging Face -> train under TP2 x PP2 on CPU -> Hugging Face, every step checked (.demo/)
	$(BIN)/megatron-vl demo --dir .demo

quick: WORKERS := 2
quick: $(READY)  ## the fast tests, which start no ranks: about 2 minutes on 2 cores
	$(PYTEST) $(SPREAD) -m "not ranks and not slow and not full" $(ARGS)

test: $(READY)   ## what guards a change, real groups of processes on CPU included: about 10 minutes on 2 cores
	$(PYTEST) $(SPREAD) -m "not full" --durations=10 $(ARGS)

test-full: $(READY) ## every test, the whole parity table, long fuzzing and twenty kills: about 40 minutes
	$(PYTEST) $(SPREAD) --durations=10 $(ARGS)

test-next: $(READY) ## the tests with the newest released Megatron-core in place of the pinned one
	rm -rf $(NEXT)
	$(INSTALL) --no-deps --upgrade --target $(NEXT) megatron-core
	@if [ -d $(NEXT)/megatron_core-$(CORE).dist-info ]; then \
	   echo "nothing newer than the pinned megatron-core $(CORE): nothing to test"; exit 0; fi; \
	 set -x; export PYTHONPATH=$(abspath $(NEXT)) MEGATRON_VL_UNTESTED_CORE=1; \
	 $(PYTEST) $(SPREAD) -m "not full" $(ARGS)

test-eval: $(VENV)/.ready-eval ## the tests of `megatron-vl evaluate`, which need VLMEvalKit
	$(PYTEST) -m "eval and not full" $(EVAL) $(ARGS)

test-transformers: $(NEWEST) ## the tests of transformers' rules, with its newest version
	PYTHONPATH=$(abspath $<) $(BIN)/python -c "import transformers as t; assert '$<' in t.__file__, t.__file__"
	PYTHONPATH=$(abspath $<) $(PYTEST) $(SPREAD) $(RULES) -k '$(EXCEPT_OWN)' $(ARGS)

# Beside the environment, which keeps its own; tokenizers and huggingface_hub of constraints.txt suit both.
$(NEWEST): $(READY)
	rm -rf $@.part
	$(INSTALL) --no-deps --target $@.part transformers==$(subst $(VENV)/transformers-,,$@)
	rm -rf $@ && mv $@.part $@

check: lint types docs ## what can be checked without running anything; pre-commit runs lint and types

lint: $(READY)   ## ruff, its formatter, which folder may import which, and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell $(SPELLED)

types: $(READY)  ## mypy
	$(BIN)/mypy

pages: $(READY)  ## the parts of pages that the code decides (support matrix, versions, layouts of long rows, GPUs)
	$(BIN)/python docs/hooks.py

# Without --quiet, with which mkdocs forgets --strict.
docs: $(READY)   ## the documentation site, built strictly (.site/); its commands are checked by the tests
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir .site

setup: $(READY)  ## the virtual environment, pinned by constraints.txt

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]' -c constraints.txt
	touch $@

eval: $(VENV)/.ready-eval ## setup with VLMEvalKit, for `megatron-vl evaluate` and its tests (needs a C compiler)

$(VENV)/.ready-eval: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev,eval]' -c constraints.txt
	touch $(READY) $@

lock: eval       ## constraints.txt from what is installed now
	( echo '# Exact versions of the development environment; written by `make lock`.'; \
	  $(BIN)/python -m pip freeze --exclude-editable ) > constraints.tmp && mv constraints.tmp constraints.txt

clean:           ## the demo's files and caches (not the virtual environment)
	rm -rf .demo .site .pytest_cache .ruff_cache .mypy_cache .import_linter_cache build *.egg-info
