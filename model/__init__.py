"""The model: shapes, weights, one explicit transformer, and the runner that executes steps of it."""
