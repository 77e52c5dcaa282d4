"""The backend `engine`: real time, real tokens."""
