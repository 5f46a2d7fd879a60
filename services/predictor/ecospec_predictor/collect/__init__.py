"""Router traces in the normal form, from our own engine and from others."""
