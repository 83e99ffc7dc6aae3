# Everything a checkout needs; each target works alone on a fresh clone.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test quick check format docs clean
.DEFAULT_GOAL := train

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The reference job on two CPU processes: the documents' network (width 10) at a twentieth of its channels.
train: $(READY)
	$(RUN)/stormo train fashion-mnist --device cpu --num-gpus 2 --task.width 0.5 --batch-size 32 --base-lr 0.04 --nesterov \
		--warmup-epochs 0.2 --decay step --decay-every 0.6 --decay-factor 0.1 --epochs 6

check: $(READY)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

# Ruff, mypy and all tests. The CPU build of torch leaves Triton out; the tests of the GPU kernels run in its interpreter where it can be had.
test: $(READY)
	$(RUN)/python -c 'import triton' 2>/dev/null || $(RUN)/pip install --quiet --disable-pip-version-check triton==3.6.0 \
		|| echo 'triton cannot be installed here: the tests of the GPU kernels are skipped'
	$(RUN)/python -m tests

# The loop of work: a part of the tests that needs no trainings, in under a minute.
quick: $(READY)
	$(RUN)/ruff check .
	$(RUN)/python -m pytest -q tests/test_architecture.py tests/test_errors.py tests/config tests/data/test_order.py tests/optim/test_schedule.py tests/energy/test_ledger.py tests/launch/test_slurm.py tests/benchmarks/test_house.py

format: $(READY)
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

# The pages as a site with a search, in build/docs; a broken link is an error.
docs: $(READY)
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(RUN)/sphinx-build -W --keep-going -E -a -q -c docs . build/docs
	@echo 'open build/docs/index.html'

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
