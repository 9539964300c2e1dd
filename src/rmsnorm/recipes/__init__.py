"""What people do with a model's gains: keep them out of weight decay, in float32, as offsets, or inside linear layers.

Norms are found by what they compute (`rmsnorm.identify`). finding.py finds them, replacement.py puts a module of this
library where another stood, outcome.py tells what was done and undoes it.
"""

from rmsnorm.recipes.decay import param_groups
from rmsnorm.recipes.folding import fold_into_linear
from rmsnorm.recipes.outcome import Outcome
from rmsnorm.recipes.weights import float32_weights, from_offset, to_offset

__all__ = ["Outcome", "float32_weights", "fold_into_linear", "from_offset", "param_groups", "to_offset"]
