"""Simulation of a fleet: many replicas behind a router."""
