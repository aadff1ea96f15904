"""Operations on single rows: norms, rotary embedding, sums and gates."""
