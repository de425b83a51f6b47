"""The settings that a recipe may state: pydantic models, one module for each section of a recipe.

Start with `schema.Recipe`. `base` holds what all settings share, such as what a change of a setting affects.
"""
