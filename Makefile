# Each target is one script of the same name; CI calls the same ones.
.DEFAULT_GOAL := help
.PHONY: help install serve test test-fast test-clients lint check format build wheels load soak bench clean
ARGS ?=

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## install embert into .venv (leaves .venv/bin/embert)
	@scripts/install

serve: ## install, then serve the default model on :8080 (ARGS="MODEL --port 9000" for others)
	@scripts/serve $(ARGS)

test: ## install, then every check and test (ARGS="tests/engine -x" for these tests alone)
	@scripts/test $(ARGS)

test-fast: ## tests without servers and compilers, in about a minute (ARGS="-k scheduler" for some)
	@scripts/test-fast $(ARGS)

test-clients: ## other projects' clients against the real server, in an environment of their own
	@scripts/test-clients $(ARGS)

lint: ## style and types only
	@scripts/install dev
	@scripts/lint

check: ## style, types, scripts, dependencies and what is known against them; runs no tests
	@scripts/check
	@scripts/audit

format: ## rewrite the sources into our style
	@scripts/format

build: ## build the CUDA encoder for one architecture (ARGS=90a-real)
	@scripts/build $(ARGS)

wheels: ## the sdist and the wheel without CUDA into dist/ (ARGS="python3.11 python3.12" for CUDA wheels too)
	@scripts/wheels $(ARGS)

load: ## a load test with a report and thresholds (ARGS="mixed --host URL --seconds 60" for others)
	@scripts/load $(ARGS)

soak: ## 20 minutes of overload, kills, idle connections and mixed work (ARGS="kills --seconds 30" for one)
	@scripts/soak $(ARGS)

bench: ## run the benchmarks (ARGS="server.compare --quick" for one)
	@scripts/bench $(ARGS)

clean: ## remove .venv and everything built
	@scripts/clean
