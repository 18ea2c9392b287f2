# Two targets do everything: `make demo` and `make test`. Each builds the environment it needs.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
OUT    ?= demo-out

bin   := $(VENV)/bin
stamp := $(VENV)/.installed
experiments := recovery controls trajectories steering resume barriers audit pairs diagnose

.PHONY: demo test test-slow fuzz lint benchmarks benchmarks-quick clean \
    docs/support.md docs/peft.md docs/results.md

demo: $(stamp)
	$(bin)/signed-align demo --out $(OUT)

# Lint, types, and the quick tests.
test: lint
	$(bin)/python -m pytest -m "not slow"

# Broken and hostile files through every reader; about half an hour. One target: --target in ARGS.
fuzz: $(stamp)
	OMP_NUM_THREADS=1 $(bin)/python -W ignore -m tests.fuzz --inputs 100000 $(ARGS)

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

# The experiments in full, but for the demo: two to three hours on two cores. Then make docs/results.md.
benchmarks: $(stamp)
	for one in apply merge spaces seeds $(experiments); do \
	    $(bin)/python benchmarks/$$one.py || exit 1; \
	done
	$(bin)/python benchmarks/trajectories.py --smollm2

# The experiments of docs/results.md at reduced size; results in build/.
benchmarks-quick: $(stamp)
	$(bin)/signed-align demo --quiet --json --out build/demo-out > /dev/null
	mkdir -p build/results && cp build/demo-out/demo.json build/results/
	for one in $(experiments); do \
	    $(bin)/python benchmarks/$$one.py --quick --results build/results || exit 1; \
	done
	$(bin)/python benchmarks/trajectories.py --smollm2 --quick --results build/results
	$(bin)/signed-align report build/results -o build/results.html --force
	$(bin)/python benchmarks/results_page.py --results build/results --out build/results.md

# The results page and its plots.
docs/results.md: $(stamp)
	$(bin)/signed-align report benchmarks/results -o build/results.html --force
	rm -rf docs/results-plots && mkdir docs/results-plots
	cp build/results-plots/*.png docs/results-plots/
	$(bin)/python benchmarks/results_page.py

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
