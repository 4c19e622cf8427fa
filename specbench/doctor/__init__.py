"""`specbench doctor`: what one running server does with its drafts, and what is wrong with its answers."""
