"""Operations on route receipts."""
