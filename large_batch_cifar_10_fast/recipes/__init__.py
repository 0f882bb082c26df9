"""What decides the weights: a file a recipe, network and numbers together. request/command_line.py has their list."""
