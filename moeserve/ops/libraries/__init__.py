"""Operations from other libraries, each with a check that it can be used."""
