"""Stages that do nothing, for measurements and tests of the pipeline itself. Workers of their own play them."""
