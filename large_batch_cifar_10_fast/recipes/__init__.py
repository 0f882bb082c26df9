"""Everything that decides the weights: a file a recipe."""

from ..recipe import Recipe
from .apple2019 import DEMO, Apple2019
from .basenet import Basenet
from .fastai import FastAI
from .muon import Muon2024, MuonRecipe
from .page import Page

__all__ = ["DEFAULT", "DEMO", "RECIPES"]
DEFAULT = Apple2019.name
RECIPES: dict[str, type[Recipe]] = {  # add yours here
    recipe.name: recipe for recipe in (Apple2019, Basenet, Page, FastAI, MuonRecipe, Muon2024)
}
