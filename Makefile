# Everything runs in .venv, installed with constraints.txt; each target sets it up if it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: test types pytest reproduce results support fuzz soak clean

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory -j 2 types pytest

types: $(READY)
	$(BIN)/mypy

pytest: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal

# Kills training runs, exports and grids at random moments and compares what they end with (some minutes).
KILLS ?= 100
SEED ?= 0
soak: $(READY)
	PYTHONPATH=tests $(BIN)/python tools/soak.py --kills $(KILLS) --seed $(SEED)

reproduce: $(READY)
	$(BIN)/deepsquare reproduce all

# docs/results.md from the rows in results/, after a change to either.
results: $(READY)
	$(BIN)/deepsquare report --results results --figures docs/figures --output out/committed
	cp out/committed/summary.md docs/results.md

# The support matrix in docs/: every model × term, by real forward and backward passes (about half an hour).
support: $(READY)
	$(BIN)/python docs/support_matrix.py

# A search for files and tensors that break the library; FUZZ="--minutes 60 --seed 7" for a longer one.
fuzz: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt atheris
	PYTHONPATH=tests $(BIN)/python -m fuzz.campaign $(FUZZ)

# The last lines let torchvision, built against CUDA, work beside the CPU build of torch: see the tool's docstring.
$(READY): pyproject.toml constraints.txt tools/torchvision_repair.py $(wildcard deepsquare/kernels/cpu*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	cp tools/torchvision_repair.py .venv/lib/python3*/site-packages/
	cd .venv/lib/python3*/site-packages && echo "import torchvision_repair" > torchvision_repair.pth
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
