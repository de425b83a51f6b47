"""Make the site of the documentation with mkdocs: `make docs` runs `mkdocs build --strict`, which loads `hook`."""
