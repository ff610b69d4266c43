"""Beside the tests' helper modules, so that pytest puts this folder on the import path."""
