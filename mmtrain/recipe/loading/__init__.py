"""From a YAML file to a checked recipe: strict reading, `extends`, presets, model folders and overrides.

Start with `recipe_loader.load_recipe`.
"""
