"""The rooms of the studio that need what the command line names: runs, tables, sessions.

    runs        the room "Your run": a saved posterior on a table
    label       the room "Label": the queries of an active learning session
    uploads     tables that a person gives to a page

They are here and not in `doxa.studio`, since they read tables and sessions as the commands do.
"""
