/* A team of one thread: it has the functions of a target's Team (a warp on a GPU), and does everything alone. */
#ifndef MPK_PLATFORM_ONE_THREAD_H
#define MPK_PLATFORM_ONE_THREAD_H

namespace mpk {
namespace platform {

/* The threads of a team call its functions together. */
struct OneThread {
  static constexpr uint32_t kSize = 1;
  MPK_DEVICE uint32_t member() const { return 0; }
  /* The leader's value, for all. The leader is member 0. */
  template <typename T>
  MPK_DEVICE T from_leader(T value) const {
    return value;
  }
  /* Bit i: the vote of member i. */
  MPK_DEVICE uint32_t vote(bool yes) const { return yes; }
  /* The sum of the members' values, for all. */
  MPK_DEVICE uint64_t sum(uint64_t value) const { return value; }
  /* A barrier: after it, all members see what any of them wrote before it. */
  MPK_DEVICE void sync() const {}
};

}  // namespace platform
}  // namespace mpk

#endif
