"""One line for frameworks: each module here serves one of them, and imports it inside its functions only."""
