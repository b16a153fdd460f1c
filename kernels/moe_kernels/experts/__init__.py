"""The routed experts of a layer: two grouped GEMMs with a gated activation between, and a weighted sum."""
