"""Hooks: declared by value, checked by name."""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import pytest

import conduit
from conduit import transforms
from conduit.core.hook import check_chain, run_hook
from conduit.errors import HookError, SchemaError


def test_the_decorators_return_a_value_that_carries_the_declaration():
    @conduit.register_ingestion(input="Actor", output="ExperienceBuffer", per="trajectory", rows="any")
    def ingestion(actor_in, exp_out):
        exp_out.write(actor_in.read() + 1)

    @conduit.register_delivery(input="ExperienceBuffer", output="Learner")
    def delivery(exp_in, learn_out):
        learn_out.write(exp_in.read() * 2)

    assert (ingestion.name, ingestion.stage, ingestion.per, ingestion.rows) == (
        "ingestion",
        "ingestion",
        "trajectory",
        "any",
    )
    assert (delivery.name, delivery.stage, delivery.per, delivery.rows) == ("delivery", "delivery", "row", "same")
    assert run_hook(ingestion, 1) == 2
    assert run_hook(delivery, 3) == 6


@pytest.mark.parametrize(
    ("register", "settings", "message"),
    [
        (conduit.register_ingestion, {"per": "batch"}, "per='batch'; expected one of row, trajectory, unit"),
        (conduit.register_ingestion, {"rows": "some"}, "rows='some'; expected one of same, any"),
        (conduit.register_ingestion, {"output": "Learner"}, "expected input='Actor', output='ExperienceBuffer'"),
        (conduit.register_delivery, {"input": "Actor"}, "expected input='ExperienceBuffer', output='Learner'"),
    ],
)
def test_a_declaration_that_means_nothing_is_refused_at_once(register, settings, message):
    with pytest.raises(HookError, match=re.escape(message)):
        register(**settings)


def hook(function):
    return conduit.register_ingestion()(function)


def test_what_a_hook_raises_is_the_cause_of_an_error_with_its_name():
    @hook
    def broken(source, sink):
        raise KeyError("obs")

    with pytest.raises(HookError, match=r"ingestion hook 'broken' raised KeyError: 'obs'") as caught:
        run_hook(broken, None)
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_of_conduits_travels_as_it_is():
    @hook
    def strict(source, sink):
        raise SchemaError("no value leaf")

    with pytest.raises(SchemaError, match="no value leaf"):
        run_hook(strict, None)


def test_a_decorator_without_parentheses_says_so():
    with pytest.raises(HookError, match=r"after parentheses: @conduit.register_ingestion\(\)"):
        conduit.register_ingestion(lambda source, sink: None)
    with pytest.raises(HookError, match=r"after parentheses: @conduit.register_delivery\(\)"):
        conduit.register_delivery(lambda source, sink: None)


def test_a_hook_writes_exactly_once():
    @hook
    def silent(source, sink):
        source.read()

    @hook
    def twice(source, sink):
        sink.write(1)
        sink.write(2)

    with pytest.raises(HookError, match=r"'silent' returned without a write"):
        run_hook(silent, None)
    with pytest.raises(HookError, match=r"'twice' wrote twice"):
        run_hook(twice, None)


def test_what_a_hook_writes_may_be_none():
    assert run_hook(hook(lambda source, sink: sink.write(None)), 1) is None


def test_a_chain_takes_hooks_of_its_own_stage_only():
    delivery = conduit.register_delivery()(lambda source, sink: None)
    with pytest.raises(HookError, match=r"ingestion= got .*which is a hook for delivery"):
        check_chain([delivery], "ingestion")
    with pytest.raises(HookError, match=r"delivery= got .*expected hooks made by @conduit.register_delivery"):
        check_chain([lambda source, sink: None], "delivery")
    with pytest.raises(HookError, match=r"ingestion= got RegisteredHook; expected a list of hooks"):
        check_chain(cast(Any, hook(np.add)), "ingestion")
    with pytest.raises(HookError, match=r"ingestion= got the class GAE; expected a hook made with it: GAE\(…\)"):
        check_chain([transforms.GAE], "ingestion")
    assert check_chain([delivery, delivery], "delivery") == (delivery, delivery)


def test_nothing_is_registered_globally():
    one, other = hook(np.add), hook(np.add)
    assert one == other
    assert one is not other
