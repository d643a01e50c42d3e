"""Neural processes: networks trained on tasks to predict a task from some of its points."""
