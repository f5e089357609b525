# Everything runs in .venv, made from constraints.txt; a target sets it up when it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: test reproduce results support clean

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

reproduce: $(READY)
	$(BIN)/deepsquare reproduce all

# docs/results.md from the rows in results/, after a change to either.
results: $(READY)
	$(BIN)/deepsquare report --results results --figures docs/figures --output out/committed
	cp out/committed/summary.md docs/results.md

# The support matrix in docs/: every model × word, by real forward and backward passes (about half an hour).
support: $(READY)
	$(BIN)/python docs/support_matrix.py

$(READY): pyproject.toml constraints.txt $(wildcard deepsquare/kernels/cpu*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
