"""The recipes, by the names `--recipe` knows them under: one file each. A new one adds its line here."""

from .apple2019 import Apple2019

RECIPES = {recipe.name: recipe for recipe in (Apple2019,)}
DEFAULT = Apple2019.name
