"""Plans are kept while structures stay: one state, or a few that alternate."""

import pytest
import torch
from torch import nn

from ckptd_client import ConfigError
from tests.unit.client.same import difference


def test_full_saves_and_saves_of_the_model_alternate_with_a_plan_each(join):
    model, client = nn.Linear(8, 8), join()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    full, part = {"model": model, "optimizer": optimizer, "step": 0}, {"model": model}
    for _ in range(5):
        client.save(full).wait("staged", 60)
        expected = model.state_dict()["weight"].clone()
        client.save(part).wait("staged", 60)
        with torch.no_grad():
            model.weight.add_(1)
    assert client.stats().plans == 2
    client.load(part)
    assert not difference(expected, model.state_dict()["weight"])


def test_a_structure_that_changes_is_planned_once_more_and_old_plans_are_released(join):
    client = join()
    for size in range(1, 9):
        state = {"w": torch.ones(size)}
        client.save(state).wait("staged", 60)
        client.save(state).wait("staged", 60)
    assert client.stats().plans == 8
    assert len(client._staging.plans._plans) < 8


def test_a_pattern_that_names_nothing_is_reported_once(join, caplog):
    client = join(replicated=["modle.*", "model.*"])
    for _ in range(2):
        client.save({"model": {"w": torch.ones(3)}}).wait("staged", 60)
    assert caplog.text.count("modle") == 1
    assert "'model.*'" not in caplog.text


@pytest.mark.parametrize("wrong", ["300", "10x", "5m", "s", 0])
def test_a_cadence_without_a_unit_is_refused(join, wrong):
    with pytest.raises(ConfigError, match="drain_every"):
        join(drain_every=wrong)
