# Two targets do everything: `make demo` and `make test`. Each builds the environment it needs.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
OUT    ?= demo-out

bin   := $(VENV)/bin
stamp := $(VENV)/.installed

.PHONY: demo test test-slow lint benchmarks clean docs/support.md docs/peft.md

demo: $(stamp)
	$(bin)/signed-align demo --out $(OUT)

# Lint, types, and the quick tests.
test: lint
	$(bin)/python -m pytest -m "not slow"

# What needs a real language model.
test-slow: $(stamp)
	$(bin)/python -m pytest -m slow

# mypy sees the package laid out as it installs.
lint: $(stamp)
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	rm -rf build/typed && mkdir -p build/typed
	cp -r signed_align build/typed/
	cp -r adapters merge_methods recipes build/typed/signed_align/
	cd build/typed && $(abspath $(bin))/mypy --config-file ../../pyproject.toml -p signed_align

benchmarks: $(stamp)
	$(bin)/python benchmarks/apply.py
	$(bin)/python benchmarks/merge.py
	$(bin)/python benchmarks/spaces.py
	$(bin)/python benchmarks/seeds.py
	$(bin)/python benchmarks/steering.py
	$(bin)/python benchmarks/audit.py

# The table of proved models.
docs/support.md: $(stamp)
	$(bin)/signed-align support --quiet --markdown > build-support.md
	mv build-support.md $@

# The table of PEFT types.
docs/peft.md: $(stamp)
	$(bin)/signed-align support --quiet --peft --markdown > build-peft.md
	mv build-peft.md $@

$(stamp): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet "$(TORCH)"
	$(bin)/python -m pip install --quiet -e ".[dev]"
	touch $@

clean:
	rm -rf build $(OUT) .mypy_cache .pytest_cache .ruff_cache .hypothesis
