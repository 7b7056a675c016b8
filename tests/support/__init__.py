"""What the tests share: processes that start without importing the stack again, and small models and data
sets."""
