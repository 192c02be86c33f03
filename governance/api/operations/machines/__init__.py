"""Operations that machines ask: workers, and doors before routers."""
