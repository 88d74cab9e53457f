# Six verbs over scripts/, which set up the Python environment on their first run.
#
#   make setup                    everything that a developer needs
#   make train                    the demo; make train ARGS="CONFIG key=value ..."
#   make test                     the everyday suite; make test ARGS="tests/tree -k mask"
#   make check                    all that a change must pass
#   make docs                     the site, into build/site
#   make bench ARGS="NAME ..."    a benchmark; without ARGS, their list

.PHONY: setup train test check docs bench

setup:
	scripts/setup.sh dev
train:
	scripts/train.sh $(ARGS)
test:
	scripts/test.sh $(ARGS)
check:
	.ci/run
docs:
	scripts/site.sh $(ARGS)
bench:
	"$$(scripts/setup.sh)" -m benchmarks $(ARGS)
