"""Operations of other libraries, each with a check of where it can be used."""
