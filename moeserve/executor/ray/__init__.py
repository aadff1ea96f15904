"""Ranks as actors of a Ray cluster: the only package that imports ray. It carries bytes that msgspec has encoded."""
