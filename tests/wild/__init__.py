"""Norms as other people wrote them: transformers' classes and models, other libraries', and many ways to write one."""
