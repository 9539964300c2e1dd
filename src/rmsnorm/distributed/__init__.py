"""Rows and their parts on several ranks."""
