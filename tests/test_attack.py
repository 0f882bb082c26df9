"""A small part of the attack (attack.py), and all its invalid options without starting the launcher."""

from dataclasses import fields

import pytest
from attack import BAD_NUMBERS
from conftest import REPO, python

from large_batch_cifar_10_fast.command_line import RECIPES
from large_batch_cifar_10_fast.launch import check_launch
from large_batch_cifar_10_fast.options import ConfigError, Launch, RunConfig


@pytest.mark.slow
def test_a_campaign_survives_kills_and_invalid_options_end_in_one_line():
    result = python("tests/attack.py", "--kills", 2, "--options", 2, "--seed", 1, cwd=REPO)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("2 kills in ")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_no_option_takes_an_invalid_number(recipe, value):
    options = [entry for owner in (RECIPES[recipe], RunConfig, Launch) for entry in fields(owner)]
    for name in (entry.name for entry in options if entry.type in (int, float)):
        with pytest.raises(ConfigError, match=r"^[^\n]+$"):
            check_launch(["--recipe", recipe, "--data", "synthetic", f"--{name}={value}"])
