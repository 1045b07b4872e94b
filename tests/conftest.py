"""Puts this folder on the import path of the tests in the folders below, for `made_evidence.py`."""
