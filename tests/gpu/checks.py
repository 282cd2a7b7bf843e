"""All checks by name, in the order in which they run: the most valuable ones come first."""

from tests.gpu.agreement import agreement_checks
from tests.gpu.cold_loads import cold_load_checks
from tests.gpu.first_graph import first_graph_checks
from tests.gpu.imports import import_checks
from tests.gpu.invariance import invariance_checks
from tests.gpu.memory import memory_checks
from tests.gpu.proofs import proof_checks
from tests.gpu.ranks import rank_checks
from tests.gpu.replays import replay_checks
from tests.gpu.setting import Check
from tests.gpu.whole_model import whole_model_checks
from tests.gpu.whole_numbers import whole_number_checks

CHECKS: dict[str, Check] = {
    **import_checks(),
    **agreement_checks(),
    **whole_number_checks(),
    **first_graph_checks(),
    **whole_model_checks(),
    **cold_load_checks(),
    **proof_checks(),
    **replay_checks(),
    **invariance_checks(),
    **rank_checks(),
    **memory_checks(),
}
