# `make help` lists the targets.

PYTHON ?= python3
# Test processes; each is single-threaded.
TEST_WORKERS ?= 2

VENV := .venv
comma := ,
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
INSTALLED := $(VENV)/installed
# The page is tested in a browser where there is one; CHROMIUM= does without.
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser)
WITH_BROWSER := $(if $(CHROMIUM),$(comma)browser)
INSTALLED_TEST := $(VENV)/installed-test$(subst $(comma),-,$(WITH_BROWSER))

.DEFAULT_GOAL := help
.PHONY: help install demo page docs test test-slow matrix gpu drawing lint format lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

install: $(INSTALLED) ## make .venv with the pinned versions
	@echo "Ready. Next: '. $(VENV)/bin/activate', then 'python train.py'."

# A stamp, so that a second `make install` takes no time. A virtual environment whose creation was
# interrupted has no working pip and is made anew.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "error: $(PYTHON) was not found: install Python 3.10 or newer, or name one with 'make install PYTHON=python3.12'."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.version_info >= (3, 10) or sys.exit("error: imagegen needs Python 3.10 or newer, but $(PYTHON) is %d.%d; name a newer one with '"'make install PYTHON=python3.12'"'." % sys.version_info[:2])'
	@$(PIP) --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV) || { \
	  rm -rf $(VENV); echo "error: $(PYTHON) could not make a virtual environment: on Debian and Ubuntu, install python3-venv first."; exit 1; }
	@echo "Installing the pinned versions into $(VENV); PyTorch is large, so the first time takes minutes."
	@$(PIP) install --editable '.[tensorboard]' --constraint constraints.txt
	@touch $@

$(INSTALLED_TEST): $(INSTALLED)
	@$(PIP) install --editable '.[test$(WITH_BROWSER)]' --constraint constraints.txt
	@touch $@

demo: $(INSTALLED) ## train, sample and complete digits, in minutes on a CPU
	@rm -rf demo/run
	$(PY) train.py logger=none hydra.run.dir=demo/run
	$(PY) sample.py ckpt=demo/run n=64 out=demo/samples
	$(PY) sample.py ckpt=demo/run task=complete n=8 completions=4 out=demo/completions
	@echo
	@echo "Look at the digits that the model drew and completed:"
	@echo "  demo/samples/grid.png"
	@echo "  demo/completions/grid.png      original, what the model saw, four completions"
	@echo
	@echo "Then type, for example:"
	@echo "  . $(VENV)/bin/activate"
	@echo "  python sample.py ckpt=demo/run n=64 seed=1 out=samples"
	@echo "  imagegen evaluate ckpt=demo/run split=test out=test.json"
	@echo "  python train.py experiment=mnist_cpu"

page: $(INSTALLED) ## open a page that draws with the models of models/ (and CKPT=<checkpoint or run folder>)
	@$(PIP) install --quiet --editable '.[page]' --constraint constraints.txt
	$(VENV)/bin/imagegen page open=true $(if $(CKPT),ckpt="$(CKPT)")

docs: $(INSTALLED) ## build the documentation as a site: build/site/index.html
	@$(PIP) install --quiet --editable '.[docs]' --constraint constraints.txt
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo "Open build/site/index.html, or '$(PY) -m http.server --directory build/site' to search in it."

test: lint ## check everything: linter, formatter, types, tests
	$(with_data) $(PY) -m pytest -n $(TEST_WORKERS) --dist loadfile

test-slow: $(INSTALLED_TEST) ## the tests that take more than a few seconds
	$(with_data) $(PY) -m pytest -m slow

gpu: $(INSTALLED_TEST) ## all that needs a CUDA GPU: checks and measurements in 12 minutes (OUT=folder)
	$(with_data) $(PY) benchmarks/gpu.py $(if $(OUT),--out "$(OUT)") $(if $(DEVICE),--device $(DEVICE))

# Real data, where a checkout of it is beside this one; tests that need it are skipped otherwise.
with_data = if [ -z "$$IMAGEGEN_SHARED_DATA" ] && [ -d ../shared/data ]; then \
	export IMAGEGEN_SHARED_DATA="$$(cd ../shared/data && pwd)"; fi;

matrix: ## the tests with other Pythons, the lowest and the newest versions (ROWS="3.10 lowest")
	$(with_data) $(PYTHON) benchmarks/matrix.py --workers $(TEST_WORKERS) $(ROWS)

lint: $(INSTALLED_TEST) ## linter, formatter and types only
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache --no-logo

drawing: $(INSTALLED_TEST) ## the rooms of the package and the imports between them: docs/rooms.svg
	$(PY) docs/rooms.py

format: $(INSTALLED_TEST) ## format the code and fix what the linter can
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

lock: $(INSTALLED_TEST) ## refresh constraints.txt from pyproject.toml (UPGRADE=--upgrade: newest versions)
	$(PIP) install --quiet uv
	$(PY) -m uv pip compile --quiet $(UPGRADE) --universal --python-version 3.10 \
	  --extra test --extra optuna --extra slurm --extra docs --extra browser --no-annotate --no-emit-index-url --custom-compile-command 'make lock' \
	  --output-file constraints.txt pyproject.toml

clean: ## remove .venv, the demo and caches; trained runs (outputs/) and data stay
	rm -rf $(VENV) .matrix demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
