"""HyperLogLog sketches (Flajolet et al., "HyperLogLog: the analysis of a near-optimal cardinality estimation
algorithm", AofA 2007) in the form of Apache DataSketches."""

from __future__ import annotations

import datasketches

SIGMAS = 3
"""Bounds are so many standard deviations away."""


def of_the_set_alone(union: datasketches.hll_union) -> datasketches.hll_sketch:
    """The union's sketch, with an estimate that depends on the set of items and not on the order they came in.

    A sketch that saw its items one by one, or got them from small sketches, estimates by its history (HIP); one that
    was merged with a full one does not. So it is merged with itself. Four bits a slot: 2 KB for ``lg_k`` 12.
    """
    sketch = union.get_result(datasketches.tgt_hll_type.HLL_8)
    twice = datasketches.hll_union(union.lg_config_k)
    twice.update(sketch)
    twice.update(sketch)
    return twice.get_result(datasketches.tgt_hll_type.HLL_4)
