"""`python -m bench.grammar`: structured output in one engine, with SmolLM2 of `make model`."""

from bench.experiment import main
from bench.grammar.phases import Phases
from bench.grammar.schemas import Schemas

EXPERIMENTS = {
    "shares": Phases(phases=((0, ""), (20, ""), (80, ""), (100, ""))),
    "schemas": Schemas(),
    "bombs": Phases(phases=((50, "free"), (50, "bombs"), (50, ""))),
}

if __name__ == "__main__":
    main("grammar", EXPERIMENTS, __doc__)
