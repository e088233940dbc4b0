"""Recipes of public DFlash pairs, and the format of an engine directory."""
