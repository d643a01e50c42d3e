"""Active learning with a person: a folder that asks for labels and takes them back."""
