# The targets a newcomer and the CI use. Each prepares the virtual environment first, once, on any machine with Python 3.12.

PYTHON ?= python3.12
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# A file's tests stay in one process: groups of processes are started once for all that read their results.
SPREAD := -n 2 --dist loadfile --no-loadscope-reorder
# Run by `make docs`, hence not again by `make test`.
DOC_TESTS := tests/test_docs.py tests/test_examples.py

# The newest transformers that pyproject.toml allows; constraints.txt has the oldest. Tests of what follows
# its rules (positions, prompts, processors, configs) run with both.
NEWEST := $(VENV)/transformers-5.23.0
RULES  := $(addprefix tests/, models/test_video_positions.py models/test_absent_fields.py \
          data/test_assemble.py data/test_chat.py data/test_pixels.py data/test_loader.py toolkit/test_hf_videos.py)

.PHONY: help demo test test-transformers check lint types docs setup eval lock clean

help:            ## what can be made
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/'

demo: $(READY)   ## Hugging Face -> train under TP2 x PP2 on CPU -> Hugging Face, every step checked (.demo/)
	$(BIN)/megatron-vl demo --dir .demo

test: $(READY)   ## the tests, real multi-process groups on CPU included
	$(PYTEST) $(SPREAD) $(addprefix --ignore=,$(DOC_TESTS)) --durations=10 $(ARGS)

test-transformers: $(NEWEST) ## the tests of transformers' rules, with its newest version
	PYTHONPATH=$(abspath $<) $(BIN)/python -c "import transformers as t; assert '$<' in t.__file__, t.__file__"
	PYTHONPATH=$(abspath $<) $(PYTEST) $(RULES) $(ARGS)

# Beside the environment, which keeps its own; tokenizers and huggingface_hub of constraints.txt suit both.
$(NEWEST): $(READY)
	rm -rf $@.part
	$(BIN)/python -m pip install --no-deps --target $@.part transformers==$(subst $(VENV)/transformers-,,$@)
	rm -rf $@ && mv $@.part $@

check: lint types docs ## what the pre-commit hooks run

lint: $(READY)   ## ruff
	$(BIN)/ruff check .

types: $(READY)  ## mypy
	$(BIN)/mypy

docs: $(READY)   ## commands of the README run, commands and YAML of the examples validated
	$(PYTEST) $(DOC_TESTS)

setup: $(READY)  ## the virtual environment, pinned by constraints.txt

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e '.[dev]' -c constraints.txt
	touch $@

eval: $(VENV)/.ready-eval ## setup with VLMEvalKit, for `megatron-vl evaluate` and its tests (needs a C compiler)

$(VENV)/.ready-eval: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e '.[dev,eval]' -c constraints.txt
	touch $(READY) $@

lock: eval       ## constraints.txt from what is installed now
	( echo '# Exact versions of the development environment; written by `make lock`.'; \
	  $(BIN)/python -m pip freeze --exclude-editable ) > constraints.tmp && mv constraints.tmp constraints.txt

clean:           ## the demo's files and caches (not the virtual environment)
	rm -rf .demo .pytest_cache .ruff_cache .mypy_cache build *.egg-info
