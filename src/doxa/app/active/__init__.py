"""Active learning with a person: a session in a folder that chooses rows and reads labels."""
