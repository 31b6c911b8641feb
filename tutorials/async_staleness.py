# %% [markdown]
# # async_staleness
#
# Text.

# %%
print(1)
