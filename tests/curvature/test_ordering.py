"""Writes to places that all differ need no order: the same bits without the sorting."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from deltabars.curvature.rewriting import in_any_order, place, rewrite_placings

WHOLE, PARTS = torch.zeros(5, 4), torch.arange(12.0).reshape(3, 4)


def traced(places):
    graph = make_fx(lambda parts: WHOLE.index_add(0, places, parts))(PARTS)
    rewrite_placings(graph.graph)
    graph.recompile()
    return graph


def targets(graph):
    return [node.target for node in graph.graph.nodes]


def test_different_places_are_rewritten():
    places = torch.tensor([4, 0, 2])
    graph = traced(places)
    assert place in targets(graph)
    expected = torch.zeros(5, 4)
    expected[places] = PARTS
    assert torch.equal(graph(PARTS), expected)


def test_places_that_repeat_are_left_to_torch():
    graph = traced(torch.tensor([4, 0, 4]))
    assert place not in targets(graph)
    assert graph(PARTS)[4].tolist() == (PARTS[0] + PARTS[2]).tolist()


def test_places_that_are_not_known_are_left_to_torch():
    graph = make_fx(lambda places, parts: WHOLE.index_add(0, places, parts))(
        torch.tensor([4, 0, 2]), PARTS
    )
    rewrite_placings(graph.graph)
    assert place not in targets(graph)


@pytest.mark.parametrize("warn_only", [False, True])
def test_the_setting_is_put_back(warn_only):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with in_any_order():
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
    finally:
        torch.use_deterministic_algorithms(False)
