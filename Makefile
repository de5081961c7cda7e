# Everything that is done with this project, by name. CI calls these targets and nothing else.

CARGO ?= cargo
ENVOY ?= target/tools/envoy

.DEFAULT_GOAL := help
.PHONY: help run envoy check test test-only tools lint fmt doc bench bench-match ci clean

help: ## Show what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## Build, and serve the rules in config/ with the log in memory (gRPC 8081, HTTP 8080, debug 6070)
	BACKEND_TYPE=memory LOG_LEVEL=$${LOG_LEVEL:-info} $(CARGO) run --release --bin slidegate -- serve --config config

envoy: tools ## Run Envoy with examples/envoy/envoy.yaml, in front of a running `make run` (HTTP 10000, admin 9901)
	$(ENVOY) --config-path examples/envoy/envoy.yaml --log-level warn

check: ## Check the rules in config/
	$(CARGO) run --release --bin slidegate -- check config

test: tools test-only ## Fetch what the tests need (redis-server, Envoy), and run them all

test-only: ## Run the tests, with the tools already there
	$(CARGO) test

tools: ## Fetch redis-server and Envoy, unless they are there
	integration/fetch-tools

lint: ## Check format, lints and documentation
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --lib

fmt: ## Format the code
	$(CARGO) fmt

doc: ## Build the library's documentation and say where it is
	$(CARGO) doc --no-deps --lib
	@echo target/doc/slidegate/index.html

bench: ## Measure Slidegate beside a bare tonic service (about three minutes)
	$(CARGO) build --release --examples
	$(CARGO) bench --bench speed

bench-match: ## Measure how matching grows with the number of rules
	$(CARGO) bench --bench match

ci: tools lint test-only ## What CI runs

clean: ## Remove everything that was built or fetched
	$(CARGO) clean
