"""Norms as other people wrote them: transformers' own classes and models, other libraries', and styles from memory."""
