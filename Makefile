# The commands people use. Each sets up what it needs on a fresh machine (Python >= 3.11 and make).
PYTHON ?= "$$(python3 packaging/interpreter.py)" # the fastest build of python3's version
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
READY := $(VENV)/.ready

FAST := tests/allocator/pool tests/allocator/prefix tests/policies/table tests/governance/decisions tests/governance/identity \
	tests/governance/restriction tests/audit/leaf tests/redteam/test_keys.py \
	tests/kernels/test_segment.py
NOT_FAST := $(addprefix --ignore=,tests/allocator/prefix/test_eviction_bound.py tests/allocator/prefix/test_window.py \
	tests/policies/table/test_tiers_reference.py) # seconds each, of one kind of fault

# The tests of a file share its set-up, and all processes one collection; two more than cores work while others wait.
IN_PARALLEL := --forks 4

# The suites' processes share two cores: a second thread of PyTorch waits for the first.
test test-fast test-system test-loaded durations: export OMP_NUM_THREADS := 1
unexport PYTHONDONTWRITEBYTECODE # suites start hundreds of processes; each would compile everything again

.PHONY: setup run dist release test test-loaded durations test-fast test-system test-engines test-newest test-oscal check docs tables editor bench soak clean

$(READY): pyproject.toml packaging/testkit/pyproject.toml constraints.txt requirements.lock
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing kvcustody and its development tools into $(VENV)"
	@$(PIP_INSTALL) -c constraints.txt torch
	@$(PIP_INSTALL) --no-deps --require-hashes -r requirements.lock
	@$(PIP_INSTALL) --no-deps -e . -e packaging/testkit
	@$(BIN)/python -m pip check --quiet --disable-pip-version-check
	@touch $(READY)

COMMANDS := console/api/commands.json
$(COMMANDS): $(READY) $(shell find console/api governance/api governance/service -name '*.py')
	@$(BIN)/python -m kvcustody.console.api.generate_commands

setup: $(READY) $(COMMANDS) ## create the development environment

run: $(READY) $(COMMANDS) ## replay a multi-tenant workload through the Governor on real tensors
	$(BIN)/kvcustody replay
	$(BIN)/kvcustody replay --compare-tiers

test: $(READY) $(COMMANDS) ## unit, property, simulation and architecture tests
	$(BIN)/python -m pytest -q $(IN_PARALLEL) -m "not soak and not system"

test-loaded: $(READY) $(COMMANDS) ## the tests beside two busy loops, in five orders: what fails depends on the clock
	$(BIN)/python tests/loaded.py

durations: $(READY) $(COMMANDS) ## write tests/DURATIONS.md: which tests take the time of `make test`, and what each buys
	$(BIN)/python -m pytest -q $(IN_PARALLEL) -m "not soak and not system" --junitxml=.cache/durations.xml
	$(BIN)/python tests/durations.py .cache/durations.xml

test-fast: $(READY) $(COMMANDS) ## the inner loop: the core on SQLite, under a minute
	$(BIN)/python -m pytest -q $(IN_PARALLEL) -m "not soak and not system" -k "not postgresql" $(NOT_FAST) $(FAST)

test-system: $(READY) $(COMMANDS) ## whole systems and long proofs: browsers, wheels, killed processes, full disks, recorded traces, every edit of a ledger
	$(BIN)/python -m pytest -q $(IN_PARALLEL) -m "system and not soak"

test-engines: ## the suites on a real vLLM, SGLang, LMCache, Dynamo and Mooncake, in environments of their own (.venv-NAME: 11 GB)
	./tests/engines/run.sh

test-newest: $(READY) ## the newest release of each engine, tried where nobody has tested it: what broke, by name
	$(BIN)/python tests/engines/releases/newest.py --run

test-s3: $(READY) ## reports handed over to a real S3 server (moto), in an environment of its own (.venv-s3)
	test -x .venv-s3/bin/moto_server || (python3 -m venv .venv-s3 && .venv-s3/bin/pip install -q "moto[server]==5.2.5")
	$(BIN)/python -m pytest -q tests/service/schedules/test_report_deliveries.py

test-oscal: $(READY) ## OSCAL documents imported and validated by compliance-trestle, in an environment of its own (.venv-trestle)
	$(BIN)/python -m pytest -q -m "system and not soak" tests/audit/reports/test_trestle.py

check: $(READY) ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

dist: $(READY) $(COMMANDS) ## wheels, a source distribution, an SBOM and checksums of the newest commit in dist/; the same commit, the same bytes
	$(BIN)/python packaging/dist.py dist

release: $(READY) $(COMMANDS) ## a signed release of the newest commit in dist/, built twice; KEY=FILE (packaging/release.py --new-key FILE)
	@$(BIN)/python packaging/release.py --key $(or $(KEY),$(error name the private key: make release KEY=release.pem)) dist

docs: $(READY) $(COMMANDS) ## build the site of docs/ in site/; fails on a broken link or anchor, a page without navigation, a stale table
	@$(BIN)/python docs/tables.py --check
	@$(BIN)/python docs/diagrams.py --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict # --quiet would drop the warnings that --strict counts

tables: $(READY) $(COMMANDS) ## write the tables and diagrams of docs/ that are made from code
	@$(BIN)/python docs/tables.py
	@$(BIN)/python docs/diagrams.py

editor: ## bundle the console's policy editor anew, of the versions in packaging/editor/package-lock.json (Node.js)
	cd packaging/editor && npm ci --ignore-scripts --no-audit --no-fund && node build.mjs ../../console/web/static/codemirror.js

soak: $(READY) ## the attack and simulation suites at 10^6 operations, kept in benchmarks/results
	$(BIN)/python benchmarks/soak.py --json benchmarks/results/soak-cpu.json

bench: $(READY) ## ratios against vLLM's own block manager (sets up .venv-vllm)
	./benchmarks/run.sh

clean:
	rm -rf $(VENV) .venv-vllm .venv-sglang .venv-s3 .venv-trestle .venv-client build dist *.egg-info
