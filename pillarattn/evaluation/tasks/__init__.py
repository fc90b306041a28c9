"""Texts and tasks that measurements run on."""
